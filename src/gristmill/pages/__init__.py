"""The live pages of `gristmill up`: jobs, their history, runs while they run, reports, dead letters, metrics. They look
at what is stored, from threads and a process of their own, so that whoever looks slows no run.
"""
