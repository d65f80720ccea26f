# Not run.
python convert_hf_to_gguf.py base --outfile base.gguf
python convert_lora_to_gguf.py adapters/sentiment --base base --outfile sentiment.gguf
llama-server -m base.gguf --lora sentiment.gguf --port 8080 &
python llamacpp.py
