"""The file layer below a sink: a local disk or an object store, with its lease."""
