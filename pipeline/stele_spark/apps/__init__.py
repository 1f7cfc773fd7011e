"""Programs for spark-submit, one file for each. They are also installed as `stele-backup`, `stele-restore`
and `stele-verify`.

spark-submit puts the folder of its file on the Python path. So these files are not among the package's
modules: some of those have names of modules of the standard library.
"""
