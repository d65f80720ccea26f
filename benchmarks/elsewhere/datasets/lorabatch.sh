lorabatch run --model base --input trl.jsonl --output trl --chat
lorabatch run --model base --input alpaca.json --output alpaca \
    --prompt-template '{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}'
lorabatch run --model base --input sharegpt.json --output sharegpt \
    --column messages=conversations --split-answer
