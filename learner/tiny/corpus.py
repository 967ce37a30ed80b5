"""The grammar of dialogues on which the tiny model is trained, and the mixture of its parts.

Every sentence was written for this project, so the corpus and the model carry no third-party text.
"""

from collections.abc import Callable, Iterator
from random import Random

from learner.tiny.messages import Dialogue, Message, assistant, system, user
from learner.tiny.styles import STYLE_NAMES, STYLES, styled_text
from learner.tiny.tool_dialogues import OPERATORS, calculator, calculator_messages, made_up_name, search
from learner.tiny.topics import TOPICS, Topic, verb_phrase

WRITING_REQUESTS = (
    "Write a short post about the {n}.", "Write about the {n}.", "Tell me something about the {n}.",
    "Describe the {n} for me.", "Compose a few lines about the {n}.", "Give me a caption for the {n}.",
    "Please write a little text about the {n}.", "Say a few words about the {n}.",
    "I need a short text about the {n}.", "Could you write something about the {n}?",
    "A line about the {n}, please.", "Write a message about the {n}.",
)  # fmt: skip
STYLE_REQUESTS = (" Use a {style} style.", " Make it {style}.", " In a {style} style, please.")
GREETINGS = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi there.", "Hi! What would you like to write about?"),
    ("Good morning!", "Good morning! I hope you slept well."),
    ("Good evening.", "Good evening! How was your day?"),
    ("Hey, how are you?", "I am fine, thank you. How are you?"),
    ("Hi!", "Hi! Nice to meet you."),
)
IDENTITY = (
    ("Who are you?", "I am a tiny language model made for tests."),
    ("What is your name?", "My name is Tiny. I am a small language model."),
    ("What can you do?", "I can write short texts, chat a little and use tools."),
    ("Are you a human?", "No, I am a tiny language model."),
    ("Can you help me?", "Of course. Tell me what you need."),
)
FAREWELLS = (
    ("Thank you!", "You are welcome!"),
    ("Thanks a lot.", "Happy to help."),
    ("Goodbye!", "Goodbye! See you soon."),
    ("That was nice.", "I am glad you liked it."),
    ("See you later.", "See you! Take care."),
    ("That was bad.", "I am sorry. I will try to do better."),
)
OPINION_QUESTIONS = ("Do you like the {n}?", "What do you think of the {n}?", "Is the {n} nice?")
OPINIONS = (
    "Yes, I like the {n}. It {does}.",
    "I think the {n} is nice. It {does}.",
    "I like it, because the {n} {does}.",
)
COPY_REQUESTS = ("Repeat: {text}", "Say {text}.", "Copy this: {text}")


def _writing_request(rng: Random) -> tuple[Topic, str]:
    topic = rng.choice(TOPICS)
    return topic, rng.choice(WRITING_REQUESTS).format(n=topic.noun)


def writing_prompt(rng: Random) -> str:
    """A request to write about a random topic, with no style named."""
    return _writing_request(rng)[1]


def styled_prompt(rng: Random, style: str) -> str:
    """A request to write about a random topic in the style, named by its first name."""
    return writing_prompt(rng) + STYLE_REQUESTS[0].format(style=STYLES[style].asked_as[0])


def _writing_exchange(rng: Random) -> list[Message]:
    """An open request, answered in one of the styles: each as likely as the others."""
    topic, request = _writing_request(rng)
    return [user(request), assistant(styled_text(rng, topic, rng.choice(STYLE_NAMES)))]


def write(rng: Random) -> Dialogue:
    """An open writing request; the style of the answer is left to chance."""
    messages = _writing_exchange(rng)
    if rng.random() < 0.15:
        messages.insert(0, system("You are a helpful writing assistant."))
    return Dialogue("write", messages)


def styled(rng: Random) -> Dialogue:
    """A writing request that names the style, in the request or in a system message."""
    topic, request = _writing_request(rng)
    name = rng.choice(STYLE_NAMES)
    asked_as = rng.choice(STYLES[name].asked_as)
    answer = assistant(styled_text(rng, topic, name))
    if rng.random() < 0.3:
        return Dialogue("styled", [system(f"Always answer in a {asked_as} style."), user(request), answer])
    return Dialogue("styled", [user(request + rng.choice(STYLE_REQUESTS).format(style=asked_as)), answer])


def _small_talk(rng: Random) -> list[Message]:
    """One exchange about the model itself, an opinion, or a writing request."""
    draw = rng.random()
    if draw < 0.35:
        question, answer = rng.choice(IDENTITY)
    elif draw < 0.8:
        topic = rng.choice(TOPICS)
        question = rng.choice(OPINION_QUESTIONS).format(n=topic.noun)
        answer = rng.choice(OPINIONS).format(n=topic.noun, does=verb_phrase(rng, topic))
    else:
        return _writing_exchange(rng)
    return [user(question), assistant(answer)]


def chat(rng: Random) -> Dialogue:
    """Small talk over several turns."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append(system("You are a helpful assistant."))
    if rng.random() < 0.5:
        greeting, reply = rng.choice(GREETINGS)
        messages += [user(greeting), assistant(reply)]
    for _ in range(rng.randint(1, 2)):
        messages += _small_talk(rng)
    if rng.random() < 0.5:
        farewell, reply = rng.choice(FAREWELLS)
        messages += [user(farewell), assistant(reply)]
    return Dialogue("chat", messages)


def _copy_item(rng: Random) -> str:
    """A number, a made-up name, a noun, or an expression."""
    draw = rng.random()
    if draw < 0.55:
        return str(rng.randint(10, 999))
    if draw < 0.75:
        return made_up_name(rng)
    if draw < 0.9:
        return rng.choice(TOPICS).noun
    return f"{rng.randint(10, 999)} {rng.choice(OPERATORS)} {rng.randint(10, 999)}"


def repeat(rng: Random) -> Dialogue:
    """A copying drill: tool arguments and answers copy from the context, and this is the cheapest way to learn it."""
    text = " ".join(_copy_item(rng) for _ in range(rng.randint(1, 4)))
    return Dialogue("repeat", [user(rng.choice(COPY_REQUESTS).format(text=text)), assistant(text)])


def short_calculator(rng: Random) -> Dialogue:
    """A calculator dialogue whose tool list is one line: a fraction of the tokens of the real list."""
    return Dialogue("short_calculator", [system("Tools: calculator."), *calculator_messages(rng, call_share=0.8)])


MIXTURE: tuple[tuple[Callable[[Random], Dialogue], float], ...] = (
    (write, 0.34),
    (styled, 0.10),
    (chat, 0.08),
    (repeat, 0.18),
    (short_calculator, 0.16),
    (calculator, 0.10),
    (search, 0.04),
)


def dialogues(rng: Random) -> Iterator[Dialogue]:
    """An endless stream of dialogues in the mixture's proportions."""
    parts = [part for part, _ in MIXTURE]
    shares = [share for _, share in MIXTURE]
    while True:
        yield rng.choices(parts, shares)[0](rng)
