"""One device, one base model, many adapters. Light modules (config, request, peft audit) load no torch."""
