lorabatch run --model base --adapters adapters/pirate --input prompts.csv --output drafts --chat
lorabatch run --model base --input drafts --column adapter= --output judged --output-prefix judge_ \
    --prompt-template 'Does a pirate say this?\n\n{{ completion }}' --choice yes --choice no
