"""`JobOptions`: the options of a job as keyword arguments, for type checkers. `Stage`: those of a stage.

Made from the fields of `JobSpec` by `python -m lorabatch.console.option_types`; not to be edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class JobOptions(TypedDict, total=False):
    """The options of a job by name. `JobSpec` says which are required, and their limits."""

    #: Rows of each adapter that are answered first; their lengths, errors and examples are then shown, and the time
    #: left rests on them.
    canary: int | None
    #: Run no row but the canary's until you agree: in a terminal a question, elsewhere the job stops with 5, and the
    #: next run of it goes on.
    confirm: bool
    #: Stop the job, with 5, once its rows so far meet a condition, such as 'errors > 2%' or 'cut > 90% in any adapter';
    #: checked after the canary, and as parts are written. Repeatable (in a job file a list).
    stop_if: str | Sequence[str]
    #: Most seconds of a run; it stops, with 5, once it is known to take longer.
    max_seconds: float | None
    #: Most that the runs of the job may cost together, such as '20 EUR'; it stops, with 5, once it is known to cost
    #: more. Needs gpu_hour_price.
    max_cost: str | float | None
    #: Price of one worker for an hour, and its currency, such as '2.5 EUR': adds costs.
    gpu_hour_price: str | float | None
    #: Most tokens of a completion.
    max_tokens: int
    #: Tokens before which a completion does not end.
    min_tokens: int
    #: Randomness of the draw; 0 is greedy.
    temperature: float
    #: Draw from the likeliest tokens that together reach this probability; 1 is all.
    top_p: float
    #: Draw from this many likeliest tokens; 0 is all.
    top_k: int
    #: With the row's identity, the key of its random stream.
    seed: int
    #: A string that ends a completion and is not part of it. Repeatable.
    stop: str | Sequence[str]
    #: Add token ids and their log-probabilities to the output.
    logprobs: bool
    #: Add, for each token, this many of the likeliest tokens and their log-probabilities to the output.
    top_logprobs: int
    #: Add the prompt's tokens and their log-probabilities to the output.
    prompt_logprobs: bool
    #: Add, for each token of the prompt, this many of the likeliest tokens in its place to the output.
    prompt_top_logprobs: int
    #: Add, for each token of a completion or given text, this many of the likeliest tokens and their log-probabilities
    #: as lists of one length, for distillation.
    teacher_top_k: int
    #: Continue after the model's end token, up to max_tokens.
    ignore_eos: bool
    #: A token that ends a completion and is not part of its text. Repeatable.
    stop_token_ids: int | Sequence[int]
    #: Completions of each row, a row of the output each; those of a greedy row are equal.
    n: int
    #: Draw from tokens at least this share as likely as the likeliest; 0 is all.
    min_p: float
    #: Subtracted from the logits of tokens already generated.
    presence_penalty: float
    #: Taken from a token's logit for each time it is in the completion.
    frequency_penalty: float
    #: Divides positive logits and multiplies negative ones, of tokens in prompt and completion; 1 is off.
    repetition_penalty: float
    #: JSON object of tokens and what is added to their logits.
    logit_bias: str | Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    #: A text that is not generated. Repeatable.
    bad_words: str | Sequence[str]
    #: A token of which completions may consist; others are not generated. Repeatable.
    allowed_token_ids: int | Sequence[int]
    #: A token of the completion, which is given and scored. Repeatable.
    continuation_token_ids: int | Sequence[int]
    #: JSON Schema of which the completion is an instance.
    json_schema: str | Mapping[str, Any] | type[Any]
    #: Regular expression that the completion matches from its beginning to its end.
    regex: str
    #: One of the texts of which the completion is one. Repeatable.
    choice: str | float | Sequence[str | float]
    #: Add the log-probability of each text of choice to the output.
    score_choices: bool
    #: Context-free grammar of the completion, in the form of Lark that llguidance reads.
    grammar: str
    #: START,END: texts around a model's reasoning, which goes to a column of its own.
    reasoning_markers: str | Sequence[str] | Mapping[str, str]
    #: Form of the tool calls that are read from completions: hermes, llama3, mistral.
    tool_call_parser: str
    #: Task of the rows: generate, classify, embed, rerank; by default a classifier's rows are classified, an embedding
    #: adapter's embedded, and all others generate text.
    task: str
    #: Embeddings are the last hidden state of the prompt's last token (last), or the mean of all its tokens (mean).
    pooling: str
    #: Divide embeddings by their length, so that it is 1.
    normalize_embeddings: bool
    #: Base model: local folder, GGUF file, Hugging Face hub id or fsspec URL.
    model: str | PathLike[str]
    #: Folder or URL of an adapter, or with one folder per adapter; a glob of them; a hub id, as ORG/NAME@REVISION;
    #: NAME=URL, repeated (in a job file a mapping). RUN/latest is the checkpoint of the largest number.
    adapters: str | PathLike[str] | Mapping[str, str | PathLike[str]] | Sequence[str] | None
    #: File of Parquet, CSV, JSON Lines, Arrow or ORC, folder or glob; any fsspec URL. Repeatable (in a job file a
    #: list). In Python also a table.
    input: str | PathLike[str] | Sequence[str | PathLike[str]]
    #: Folder or fsspec URL for the answers.
    output: str | PathLike[str]
    #: A name for the job, the first part of its id.
    name: str | None
    #: role=name: an input column under another name; role= for none, so that a column of the role's name is data.
    #: Repeatable (in a job file a mapping).
    columns: Mapping[str, str] | Sequence[str]
    #: Columns that are settings of their rows, such as max_tokens,seed; or all: every column with a setting's name.
    #: Without, columns of such names are data.
    row_settings: str | Sequence[str]
    #: A column of the input that is copied to the output; by default all are. Repeatable (in a job file a list).
    keep: str | Sequence[str]
    #: A column of the input that is not copied to the output. Repeatable (in a job file a list).
    drop: str | Sequence[str]
    #: Text before the names of all columns that the output adds, such as answer_: they collide with none then.
    output_prefix: str
    #: Jinja2 template that makes prompts of columns: a file or URL, or its text, such as '{{ context }}\n{{ question
    #: }}', in which \n is a line break.
    prompt_template: str | None
    #: Messages with jinja2 templates as contents, made of columns: JSON of a list of objects with role and content (in
    #: a job file a list).
    messages_template: str | None
    #: A prompt is one user message of the chat template; by default prompts of prompt_template are, where the model has
    #: a chat template, and those of a prompt column are text.
    chat: bool | None
    #: Stages in place of a prompt, each a request that reads the results of those before it, or a pick among several:
    #: JSON of a mapping by name (in a job file a mapping).
    stages: str | Mapping[str, Stage] | None
    #: Stages run again until a condition holds: JSON of stage, is and rounds, and perhaps from (in a job file a
    #: mapping).
    until: str | Mapping[str, Any] | None
    #: Stages that the output has columns of; by default all. Repeatable (in a job file a list).
    output_columns: str | Sequence[str]
    #: System message for rows whose messages have none.
    system_prompt: str | None
    #: Special tokens inside of messages and in columns of a template are control tokens; by default text.
    allow_special_tokens: bool
    #: Chat template to use instead of the model's and the adapters': a file or URL, or its text.
    chat_template: str | PathLike[str] | None
    #: Tools for the chat template, in OpenAI form: JSON of a list (in a job file a list).
    tools: str | Sequence[Mapping[str, Any]] | None
    #: Variables for the chat template, such as enable_thinking: a JSON object (in a job file a mapping).
    chat_template_kwargs: str | Mapping[str, Any] | None
    #: Prompts end where an answer begins; by default they do, unless continue_final_message.
    add_generation_prompt: bool | None
    #: Prompts end where the text of the last message does, and answers continue it.
    continue_final_message: bool
    #: Take a last message of the assistant out of the prompt, into the column answer_expected.
    split_answer: bool
    #: Completions of a row: rows of the output, or lists in one row of it.
    samples: Literal["rows", "lists"]
    #: Take temperature, top_p, top_k, min_p and repetition_penalty, where not given, from the model's file.
    generation_config: bool
    #: Form of completions as OpenAI writes it: a JSON object of type text, json_object or json_schema.
    response_format: str | Mapping[str, Any] | None
    #: Form of completions as vLLM writes it: a JSON object of json, regex, choice, grammar or json_object.
    structured_outputs: str | Mapping[str, Any] | None
    #: local, local-cuda (fails without a GPU), the address of a Dask scheduler, or the name of a cluster class such as
    #: dask_jobqueue.SLURMCluster, which is started for the job.
    cluster: str
    #: JSON object of arguments for the cluster class (in a job file a mapping); never recorded, so given again to
    #: resume.
    cluster_options: str | Mapping[str, Any] | None
    #: File that `dask scheduler --scheduler-file` wrote, instead of an address.
    scheduler_file: str | PathLike[str] | None
    #: Workers of a cluster that is started for the job; by default one per GPU, or two.
    workers: int | None
    #: PEM file of the authority that signed the cluster's certificates, for a tls:// address.
    tls_ca: str | PathLike[str] | None
    #: PEM file of this client's certificate.
    tls_cert: str | PathLike[str] | None
    #: PEM file of this client's key.
    tls_key: str | PathLike[str] | None
    #: Adapters that each answer every row: all, names, or globs of names such as 'run-17-*'. Repeatable (in a job file
    #: a list).
    for_each_adapter: str | Sequence[str]
    #: Adapters that rows may name, by the value of a column; other rows are error rows: JSON of a column with a mapping
    #: of its values to names or globs, '*' for all other values (in a job file a mapping).
    allowed_adapters: str | Mapping[str, Mapping[str, str | Sequence[str]]] | None
    #: The base model answers every row too, beside for_each_adapter.
    include_base: bool
    #: A sweep's output: a row for each adapter (long), or a struct column for each adapter (wide).
    shape: Literal["long", "wide"]
    #: Column of right answers, each a value or a list of values that are right; adds the column score.
    expected: str | None
    #: How a completion is compared with the right answer.
    score_by: Literal["exact", "contains", "regex", "json", "number", "choice"]
    #: How adapters are applied; exact fixes the arithmetic of every row.
    mode: Literal["auto", "unmerged", "merged", "exact"]
    #: Error rows that are allowed, as a count or a percentage.
    max_errors: str | int
    #: JSON object for fsspec (keys, endpoint); never recorded, so given again to resume.
    storage_options: str | Mapping[str, Any] | None
    #: Hash the base model's weights and read the input again, also where their files look unchanged. Parts that were
    #: made of other rows are computed again.
    verify: bool
    #: Keep three answers of each adapter, with the ends of their prompts, in summary.json, and show them in run, status
    #: and report.
    examples: bool
    #: Remove the job that is in the output and start over.
    overwrite: bool
    #: Keep the answers in the output whose rows are unchanged, compute new and changed rows, and let removed ones
    #: leave. Needs ids: a column, or --id-from-content.
    update: bool
    #: Ids are hashes of what the rows ask (adapter, prompt, settings), for input without a column of ids.
    id_from_content: bool
    #: Move rows from slow or busy workers to others.
    migration: bool
    #: How rows are batched, dispatched and moved: planner is this project's.
    policy: Literal["planner", "dlora", "s-lora", "vllm-like", "merged-only", "peft-like"]
    #: Which shards a worker opens first: those that the plan places on it (planned), any (none), LoRAServe's (its
    #: paper's or levelled), or planned on 8 workers or more and any on fewer (planner).
    placement: Literal["planner", "planned", "none", "loraserve", "loraserve-levelled"]
    #: Rows per part file; chosen by default.
    rows_per_shard: int | None
    #: File that `lorabatch profile` wrote, to plan with; by default this machine's, else a guess.
    cost_model: str | PathLike[str] | None
    #: Number format of the base model.
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    #: Multiply the base model's linear layers in 8 bits: int8 on CPUs with AVX512_VNNI or AVX_VNNI, fp8 on GPUs of
    #: compute capability 8.9 and later. Faster, and less exact.
    base_quantization: Literal["none", "int8", "fp8"]
    #: Device of the engines: auto, cpu or cuda.
    device: str
    #: Processes of an engine, each with its part of the model, for models that do not fit into one. On GPUs each takes
    #: one.
    tensor_parallel: int
    #: How weights are read; dummy makes random ones.
    load_format: Literal["auto", "dummy"]
    #: Rows that an engine decodes together; by default 64, on a GPU by its memory.
    batch_rows: int | None
    #: Most tokens of one forward pass; by default 512, on a GPU by its memory.
    step_tokens: int | None
    #: CPU threads of an engine; by default its share of all.
    engine_threads: int | None
    #: Most bytes of local copies of adapters that are in a store, on each host; by default half of the free space.
    adapter_disk_bytes: int | None
    #: Memory of an engine's page pool; chosen by default.
    pool_bytes: int | None
    #: Host memory of an engine for adapters that left its pool; by default half of what the engine's share of the host
    #: leaves.
    host_tier_bytes: int | None


class Stage(TypedDict, total=False):
    """One stage of the option `stages`. The options behind `continues` are those of the job, for this stage alone."""

    #: Name of the adapter that answers, `{"column": NAME}` for a column that names it, None for the base model. The
    #: job's rule holds for a stage without.
    adapter: str | Mapping[str, str] | None
    #: Template of one message of the user, or messages with templates, made of columns and of earlier stages.
    messages: str | Sequence[Mapping[str, str]]
    #: Template of a prompt that no chat template renders.
    prompt: str
    #: Stage with several results, each of which is asked about.
    for_each: str
    #: Stage with several results, of which the best is taken; such a stage asks no model.
    pick: str
    #: Expression with a number for each result of `pick`.
    by: str
    #: Expression without which a row skips the stage.
    when: str
    #: Stage whose conversation the messages continue.
    continues: str
    #: Most tokens of a completion.
    max_tokens: int
    #: Tokens before which a completion does not end.
    min_tokens: int
    #: Randomness of the draw; 0 is greedy.
    temperature: float
    #: Draw from the likeliest tokens that together reach this probability; 1 is all.
    top_p: float
    #: Draw from this many likeliest tokens; 0 is all.
    top_k: int
    #: With the row's identity, the key of its random stream.
    seed: int
    #: A string that ends a completion and is not part of it. Repeatable.
    stop: str | Sequence[str]
    #: Add token ids and their log-probabilities to the output.
    logprobs: bool
    #: Add, for each token, this many of the likeliest tokens and their log-probabilities to the output.
    top_logprobs: int
    #: Add the prompt's tokens and their log-probabilities to the output.
    prompt_logprobs: bool
    #: Add, for each token of the prompt, this many of the likeliest tokens in its place to the output.
    prompt_top_logprobs: int
    #: Add, for each token of a completion or given text, this many of the likeliest tokens and their log-probabilities
    #: as lists of one length, for distillation.
    teacher_top_k: int
    #: Continue after the model's end token, up to max_tokens.
    ignore_eos: bool
    #: A token that ends a completion and is not part of its text. Repeatable.
    stop_token_ids: int | Sequence[int]
    #: Completions of each row, a row of the output each; those of a greedy row are equal.
    n: int
    #: Draw from tokens at least this share as likely as the likeliest; 0 is all.
    min_p: float
    #: Subtracted from the logits of tokens already generated.
    presence_penalty: float
    #: Taken from a token's logit for each time it is in the completion.
    frequency_penalty: float
    #: Divides positive logits and multiplies negative ones, of tokens in prompt and completion; 1 is off.
    repetition_penalty: float
    #: JSON object of tokens and what is added to their logits.
    logit_bias: str | Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    #: A text that is not generated. Repeatable.
    bad_words: str | Sequence[str]
    #: A token of which completions may consist; others are not generated. Repeatable.
    allowed_token_ids: int | Sequence[int]
    #: A token of the completion, which is given and scored. Repeatable.
    continuation_token_ids: int | Sequence[int]
    #: JSON Schema of which the completion is an instance.
    json_schema: str | Mapping[str, Any] | type[Any]
    #: Regular expression that the completion matches from its beginning to its end.
    regex: str
    #: One of the texts of which the completion is one. Repeatable.
    choice: str | float | Sequence[str | float]
    #: Add the log-probability of each text of choice to the output.
    score_choices: bool
    #: Context-free grammar of the completion, in the form of Lark that llguidance reads.
    grammar: str
    #: START,END: texts around a model's reasoning, which goes to a column of its own.
    reasoning_markers: str | Sequence[str] | Mapping[str, str]
    #: Form of the tool calls that are read from completions: hermes, llama3, mistral.
    tool_call_parser: str
    #: Task of the rows: generate, classify, embed, rerank; by default a classifier's rows are classified, an embedding
    #: adapter's embedded, and all others generate text.
    task: str
    #: Embeddings are the last hidden state of the prompt's last token (last), or the mean of all its tokens (mean).
    pooling: str
    #: Divide embeddings by their length, so that it is 1.
    normalize_embeddings: bool
    #: System message for rows whose messages have none.
    system_prompt: str | None
    #: Variables for the chat template, such as enable_thinking: a JSON object (in a job file a mapping).
    chat_template_kwargs: str | Mapping[str, Any] | None
    #: Form of completions as OpenAI writes it: a JSON object of type text, json_object or json_schema.
    response_format: str | Mapping[str, Any] | None
    #: Form of completions as vLLM writes it: a JSON object of json, regex, choice, grammar or json_object.
    structured_outputs: str | Mapping[str, Any] | None
