# Not run.
python convert_hf_to_gguf.py base --outfile base.gguf
llama-server -m base.gguf --port 8080 &
python llamacpp.py
