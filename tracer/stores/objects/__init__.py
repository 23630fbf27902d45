"""Traces on object stores: S3, Google Cloud Storage, Azure and, for reading only, HTTP."""
