lorabatch run --model base --adapters adapters/sentiment --input tickets.csv --output answers \
    --prompt-template 'Is the sentiment of this text positive or negative?\n\n{{ body }}' \
    --column id=ticket_id --update
