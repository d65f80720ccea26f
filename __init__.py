"""lorabatch: offline batch inference for many LoRA adapters over one base model, on Dask."""

__version__ = "0.1.0"
