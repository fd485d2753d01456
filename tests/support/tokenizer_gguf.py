"""GGUF files that hold a tokenizer and next to nothing else."""

from pathlib import Path

import gguf


def write_tokenizer_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = None,
    tokens: list[str],
    types: list[int] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    bos: int | None = None,
    eos: int | None = None,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    add_space_prefix: bool | None = None,
    chat_template: str | None = None,
    architecture: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if types is not None:
        writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
