"""Settings: flag, then ``GPUOPS_*`` variable, then file, then default; each knows its origin.

`schema` lists the settings and parses their values, `resolve` reads them. Only `resolve` reads the
environment.
"""
