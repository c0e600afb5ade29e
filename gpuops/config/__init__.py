"""Settings: flag, then ``GPUOPS_*`` variable, then file, then default; each knows its origin.

`values` says what a setting is and how text becomes a value, `schema` lists the settings, `resolve`
reads them. Only `resolve` reads the environment.
"""
