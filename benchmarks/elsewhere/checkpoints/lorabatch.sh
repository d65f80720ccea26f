duckdb -c "COPY (FROM 'prompts.csv', (VALUES ('checkpoint-500'), ('checkpoint-1000'),
    ('checkpoint-1500'), (NULL)) AS a(adapter)) TO 'rows.parquet'"
lorabatch run --model base --adapters 'runs/17/checkpoint-*' --input rows.parquet --output answers --chat
