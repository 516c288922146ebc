"""The one thing pyproject.toml cannot say: the C core is built by cffi from native/build_ffi.py."""

from setuptools import setup

setup(cffi_modules=["native/build_ffi.py:ffibuilder"])
