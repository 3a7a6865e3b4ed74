"""The implementation. What users import stands in `jaxzero`."""
