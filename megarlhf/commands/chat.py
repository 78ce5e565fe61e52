"""`megarlhf chat`: talk to a model folder on this machine, in the terminal."""

from collections.abc import Sequence

from megarlhf.config.flags import Parser

SUMMARY = "talk to a Hugging Face model folder: megarlhf chat MODEL_DIR [--plain]"


def main(argv: Sequence[str]) -> int:
    """Reads lines until end of file or an empty line; prints the model's answer to each."""
    options = _parser().parse_args(argv)
    from megarlhf import device

    device.prepare()
    device.join_world()
    from megarlhf.engines.generator import Generator, Request, Sampling
    from megarlhf.loop.inference import load_model, load_tokenizer

    tokenizer = load_tokenizer(options.model, options.base)
    model = load_model(options.model, tp=1, pp=1, dtype="float32", world_size=1, base=options.base)
    generator = Generator(model, max_slots=1)
    sampling = Sampling(
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        seed=options.seed,
    )
    messages: list[dict[str, object]] = []
    print("an empty line ends the conversation" if not options.plain else "an empty line ends; every line is continued")
    for number, line in enumerate(iter(_read_line, "")):
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.encode_prompt(line if options.plain else messages)
        answer = generator.generate([Request(tuple(prompt), row_id=number)], sampling)[0]
        text = tokenizer.decode(answer.token_ids)
        messages.append({"role": "assistant", "content": text})
        print(text, flush=True)
    device.leave_world()
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _parser() -> Parser:
    parser = Parser(prog="megarlhf chat", description=SUMMARY)
    parser.add_argument("model", help="Hugging Face model folder, or a folder of LoRA adapters")
    parser.add_argument("--base", default="", help="folder of the model that LoRA adapters are for, if not as they say")
    parser.add_argument("--plain", action="store_true", help="continue each line as it is, without the chat template")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the most likely token")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="an answer is cut here")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    return parser
