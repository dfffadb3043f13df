"""The parallel map: a function over inputs, on the engines that run jobs."""
