"""One device, one base model, many adapters. Light modules (config, request, adapter audit) load no torch."""
