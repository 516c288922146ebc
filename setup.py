"""What pyproject.toml cannot say: the C core is built by cffi from native/build_ffi.py, and keeps to
CPython's stable ABI, so that one wheel serves every version from 3.11 on.
"""

from setuptools import setup

setup(cffi_modules=["native/build_ffi.py:ffibuilder"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
