"""`jaxzero.export.export`: parameters as safetensors files, from a checkpoint or from memory."""

from ._src.checkpoint.export import export

__all__ = ["export"]
