"""One other decoder, in a process (and, where needed, a virtual environment) of its own.

    PYTHON worker.py transformers|llama.cpp|vllm MODEL

MODEL is a Hugging Face folder, for llama.cpp a .gguf file. The process says `{"ready": ...}`, then
answers each request line on stdin, {"prompts": [[id]], "samples", "max_new_tokens", "eos_ids",
"seed"}, with {"seconds", "lengths"}: generated tokens of every response, its EOS included. It reads
nothing else, imports nothing of this project, and waits without working between requests.
"""

import json
import os
import sys
import time


def transformers_runner(model_path: str):
    """A static batch, left-padded, through `generate`; returns run(request) -> lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def run(request: dict) -> list[int]:
        rows = [ids for ids in request["prompts"] for _ in range(request["samples"])]
        eos, longest = request["eos_ids"], max(len(ids) for ids in rows)
        pad = eos[0] if eos else 0
        tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in rows])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows])
        # Set here: as an argument, None would fall back to the checkpoint's own.
        model.generation_config.eos_token_id = eos or None
        torch.manual_seed(request["seed"])
        out = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=request["max_new_tokens"],
            pad_token_id=pad,
        )
        return [length_of(row, eos) for row in out[:, longest:].tolist()]

    return run, f"transformers, {torch.get_num_threads()} threads"


def length_of(tokens: list[int], eos_ids: list[int]) -> int:
    """Tokens up to and including the first EOS, or all."""
    return next((i + 1 for i, t in enumerate(tokens) if t in eos_ids), len(tokens))


def llama_runner(model_path: str, rows: int = 32, context: int = 512):
    """Prompts decoded once and copied to their members, then one batch of all live sequences a
    step, sampled by llama.cpp's own `dist` sampler; returns run(request) -> lengths."""
    import llama_cpp as ll

    ll.llama_backend_init()
    params = ll.llama_model_default_params()
    model = ll.llama_model_load_from_file(model_path.encode(), params)
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = rows * context, context, context
    params.n_seq_max = rows
    params.n_threads = params.n_threads_batch = os.cpu_count()
    params.type_k = params.type_v = ll.GGML_TYPE_F32
    params.kv_unified = False
    ctx = ll.llama_init_from_model(model, params)
    memory = ll.llama_get_memory(ctx)
    batch = ll.llama_batch_init(context, 0, 1)

    def decode(entries):
        """entries: (token, position, sequence, whether logits are wanted)."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        if code := ll.llama_decode(ctx, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def run(request: dict) -> list[int]:
        samples, eos, most = request["samples"], request["eos_ids"], request["max_new_tokens"]
        sampler = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
        ll.llama_sampler_chain_add(sampler, ll.llama_sampler_init_dist(request["seed"]))
        ll.llama_memory_clear(memory, True)
        lengths, newest, position = [], [], []
        for group, ids in enumerate(request["prompts"]):
            first = group * samples
            decode([(t, i, first, i == len(ids) - 1) for i, t in enumerate(ids)])
            for member in range(samples):
                if member:
                    ll.llama_memory_seq_cp(memory, first, first + member, -1, -1)
                newest.append(ll.llama_sampler_sample(sampler, ctx, -1))
                position.append(len(ids))
                lengths.append(1)
        live = [r for r in range(len(lengths)) if newest[r] not in eos and most > 1]
        while live:
            decode([(newest[r], position[r], r, True) for r in live])
            for i, r in enumerate(live):
                newest[r] = ll.llama_sampler_sample(sampler, ctx, i)
                position[r] += 1
                lengths[r] += 1
            live = [r for r in live if newest[r] not in eos and lengths[r] < most]
        ll.llama_sampler_free(sampler)
        return lengths

    return run, f"llama-cpp-python {ll.__version__}, {os.cpu_count()} threads, float32 cache"


def vllm_runner(model_path: str):
    """vLLM's offline API on its CPU backend; returns run(request) -> lengths."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, which ends with ours
    import vllm

    llm = vllm.LLM(model_path, dtype="float32", max_model_len=512, max_num_seqs=32)

    def run(request: dict) -> list[int]:
        sampling = vllm.SamplingParams(
            n=request["samples"],
            temperature=1.0,
            max_tokens=request["max_new_tokens"],
            ignore_eos=not request["eos_ids"],
            stop_token_ids=request["eos_ids"] or None,
            seed=request["seed"],
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [len(answer.token_ids) for out in outputs for answer in out.outputs]

    return run, f"vllm {vllm.__version__}"


RUNNERS = {"transformers": transformers_runner, "llama.cpp": llama_runner, "vllm": vllm_runner}


def main():
    # Answers go to the real stdout; libraries that print get stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict):
        print(json.dumps(message), file=answers)

    try:
        run, name = RUNNERS[sys.argv[1]](sys.argv[2])
    except ImportError as e:
        answer({"missing": str(e)})
        return
    answer({"ready": name})
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        lengths = run(request)
        answer({"seconds": time.perf_counter() - start, "lengths": lengths})


if __name__ == "__main__":
    main()
