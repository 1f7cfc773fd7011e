"""Programs for spark-submit, a file for each. They are also installed as `stele-backup`, `stele-restore` and `stele-verify`.

spark-submit puts the folder of its file on the Python path. So these files are apart from the package's modules, some of
which are called as modules of the standard library.
"""
