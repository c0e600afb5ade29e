"""Measuring tools of others, where installed: nccl-tests, nvbandwidth, fio, perftest.

Each module has the command of one tool and a pure parser of the JSON that its source writes; `run`
runs it. A field that is not named here is ignored.
"""
