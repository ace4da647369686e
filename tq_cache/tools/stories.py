"""Plain English stories from templates: the filler that the tasks hide their facts in.

A text keeps one cast (villages, pets, keepsakes with invented names) from start to end, so a
damaged cache also shows in perplexity. Made with :class:`random.Random` only: a seed gives the
same text on every machine, and changing a word or template below changes all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .words import (
    ADVERBS,
    ANIMALS,
    CODAS,
    COLOURS,
    COUNTED,
    DAYS,
    FEELINGS,
    FOODS,
    HE,
    ONSETS,
    SHE,
    SPOTS,
    THINGS,
    TIMES,
    TRADES,
    VOWELS,
    WEATHER,
)

# --------------------------------------------------------------------------------------------
# Stories

_INTRO = (
    "{A} was the {trade} of {home}.",
    "In {home} there lived a {trade} called {A}.",
    "{A} the {trade} had always lived in {home}.",
    "{A} had {a_animal} called {pet}.",
    "Everybody in {home} knew {A} and the {animal} {pet}.",
    "{A} never went anywhere without the {keep}.",
    "{A} owned {a_keep}, and nobody was allowed to touch it.",
    "{A} liked {food} more than anything else.",
    "{A} and {B} had been friends for {n} years.",
    "{A} lived in {home}, but {B} lived in {homeB}.",
    "Long ago {B} had moved from {home} to {homeB}.",
    "{A} kept {a_keep} on a shelf by the window.",
    "{B} was the best {tradeB} between {home} and {homeB}.",
    "The {animal} {pet} followed {A} everywhere.",
    "In {homeB} they still spoke of {B} and {a_keepB}.",
)
_OPEN = (
    "It was a {weather} {time} in {home}.",
    "On {day} {A} woke up early and felt {feel}.",
    "One {weather} {time}, {A} left {home} and walked to the {spot}.",
    "The {time} was {weather}, and {A} was {feel}.",
    "Nobody in {home} expected a {weather} {day}.",
    "{A} had waited for {day} all week.",
    "On a {weather} {day}, {A} and {B} met at the {spot}.",
    "Late on {day}, someone knocked at the door of {A}.",
    "All of {home} was asleep, but {A} was awake.",
    "When the {weather} weather came, {B} travelled to {home}.",
    "It had been {weather} since {day}.",
    "{B} arrived at the {spot} before {time} with {a_thing}.",
    "By {time} everyone in {homeB} knew that {A} was {feel}.",
)
_MIDDLE = (
    "{A} {work}.",
    "{A} {work}, and {B} helped.",
    "{She} {work} while the {animal} {pet} slept.",
    "{She} walked to the {spot} and waited for {B}.",
    "{A} sat down near the {spot} and ate some {food}.",
    "{B} came from {homeB} with {a_thing}.",
    '"Where is the {keep}?" asked {B}.',
    '"I left it at the {spot}," said {A}.',
    '"Have you seen {pet}?" asked {A}.',
    '"Your {animal} is at the {spot}," said {B}.',
    '"Tell me about {homeB}," said {A}.',
    '"I miss {homeB}," said {B}, and looked {feel}.',
    '"Come with me to {home}," said {A}.',
    '"It is too {weather} to go to the {spot}," said {B}.',
    "The {animal} {pet} ran ahead to the {spot}.",
    "{pet} found {a_thing} behind the {spot}.",
    "{pet} the {animal} was {feel} and would not move.",
    "{A} showed {B} the {keep}.",
    "{A} lent the {keep} to {B} until {day}.",
    "{B} gave the {keep} back to {A}.",
    "{A} looked for the {keep} near the {spot}.",
    "{B} still had the {keepB}.",
    "{B} talked about the {animalB} {petB} for a long time.",
    "{petB} and {pet} played at the {spot}.",
    "They counted {n} {counted} at the {spot}.",
    "There were {n} {counted} near the {spot}, and {A} counted them twice.",
    "{A} wrote a letter to {B} in {homeB}.",
    "{B} wanted {foodB}, but there was only {food}.",
    "{A} cooked {foodB} for {B}.",
    "{She} bought {a_thing} from the {tradeB}.",
    "The road from {home} to {homeB} was long and {weather}.",
    "{A} felt {feel}, but {B} felt {feelB}.",
    "The wind blew from the {spot} toward {home}.",
    "{A} forgot the {thing} at the {spot}.",
    "{B} the {tradeB} {workB}.",
    "{He_B} {workB} and thought of {A}.",
    "{A} asked the {tradeB} from {homeB} for help.",
    "Nobody at the {spot} had heard of {homeB}.",
    "{A} often dreamed of the {spot}.",
    "The bell rang {n} times in {home}.",
    '"My {animal} is called {pet}," said {A}.',
    '"And my {animalB} is called {petB}," said {B}.',
    '"You are the {tradeB} of {homeB}, are you not?" asked {A}.',
    '"Nobody makes {food} as good as yours," said {B}.',
    '"I would not sell the {keep} for {n} gold coins," said {A}.',
    '"Did you bring the {keepB}?" asked {A}, and {B} nodded.',
    '"We should leave {home} before {time}," said {B}.',
    '"Why are you so {feel}?" asked {B}.',
    '"Because the {animal} is {feel}," said {A}.',
    "{B} hid {a_thing} under the stairs of the {spot}.",
    "{A} tied a string around the {keep} so as not to lose it.",
    "{A} told the children of {homeB} a long tale about {pet}.",
    "Two strangers from {homeB} asked the way to the {spot}.",
    "{A} broke the {thing} and felt {feel} about it.",
    "The {trade} and the {tradeB} argued about the price of {food}.",
    "For {n} days there was no news from {homeB}.",
    "A letter came from {homeB}, but it was only about the {animalB} {petB}.",
    "{A} polished the {keep} until it shone.",
    "{B} slipped near the {spot} and dropped the {thing}.",
    "{pet} barked at nothing, or made whatever noise {a_animal} makes.",
    "Rain fell on the roof, and {A} thought about {homeB}.",
    "{A} traded {a_thing} for some {foodB}.",
    "By {time} the {spot} was empty, and only {pet} remained.",
    "{B} drew a small map that showed {home} and {homeB}.",
    "{A} could not sleep and listened to the wind from the {spot}.",
    "There was a {colour} door at the {spot}, and nobody had the key.",
    "Somebody had painted the {thing} {colour}, and {B} was {feel}.",
    "{A} and {B} sang an old song about {home}.",
    "The old clock in {homeB} was {n} minutes late.",
    "{B} promised to look after {pet} until {day}.",
    "{A} slept in a chair with the {keep} in one hand.",
    "{B} ate the last of the {foodB} and said nothing.",
)
_RETURN = (  # Sentences about the chapter's own place and count, so they are predictable.
    "All {n} {counted} were still there.",
    "{A} was still thinking of the {n} {counted}.",
    '"I counted {n} {counted}," said {A}.',
    "They went back to the {spot} together.",
    "Even the {spot} looked {weather} now.",
)
_CLOSE = (
    "In the end {A} went home to {home}.",
    "That {time} {A} slept well, with {pet} beside the bed.",
    "{B} took the road back to {homeB}, and {A} waved.",
    "{A} put the {keep} away and closed the door.",
    "And so the {weather} {day} came to an end.",
    "They shared some {food} and laughed.",
    "From then on, {A} and {B} met every {day} at the {spot}.",
    "{A} was {feel} again, and so was {pet} the {animal}.",
    "Nobody spoke of the {spot} again until {day}.",
    "{A} locked the door, fed {pet}, and put out the light.",
    "Both of them were {feel}, and the {keep} was safe.",
    "{B} stayed in {home} for {n} days and then went back to {homeB}.",
    "The {time} was over, and {home} was quiet.",
)


def invented_name(rng: random.Random) -> str:
    """A capitalised made-up word of two or three syllables, such as "Belmar"."""
    syllables = rng.choice((2, 2, 2, 3))
    word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))
    return (word + rng.choice(CODAS)).capitalize()


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


@dataclass(frozen=True)
class _Person:
    name: str
    pronoun: str
    trade: str
    home: str
    animal: str
    pet: str
    keepsake: str
    food: str


class _World:
    """A cast that stays the same for a whole text."""

    def __init__(self, rng: random.Random, people: int = 5):
        self.rng = rng
        cast = rng.sample([(n, "She") for n in SHE] + [(n, "He") for n in HE], people)
        self.people = [
            _Person(
                name=name,
                pronoun=pronoun,
                trade=rng.choice(list(TRADES)),
                home=invented_name(rng),
                animal=rng.choice(ANIMALS),
                pet=invented_name(rng),
                keepsake=f"{rng.choice(COLOURS)} {rng.choice(THINGS)}",
                food=rng.choice(FOODS),
            )
            for name, pronoun in cast
        ]

    def chapter(self) -> list[str]:
        """One short chapter as sentences, its place, weather, day and count held fixed."""
        rng = self.rng
        first, second = rng.sample(self.people, 2)
        fixed = {
            "spot": rng.choice(SPOTS),
            "weather": rng.choice(WEATHER),
            "day": rng.choice(DAYS),
            "time": rng.choice(TIMES),
            "n": str(rng.randint(3, 60)),
            "counted": rng.choice(COUNTED),
        }
        opening = rng.sample(_INTRO, rng.randint(1, 3)) + [rng.choice(_OPEN)]
        middle = rng.sample(_MIDDLE, rng.randint(4, 9))
        if any("{counted}" in template for template in middle):
            middle += rng.sample(_RETURN[:3], 1)
        middle += rng.sample(_RETURN[3:], rng.randint(0, 1))
        templates = opening + middle + rng.sample(_CLOSE, rng.randint(1, 2))
        sentences = []
        for index, template in enumerate(templates):
            # Mostly tell about the first person; pronouns stay with whoever is the subject.
            pair = (first, second) if rng.random() < 0.8 else (second, first)
            sentence = template.format_map(_Slots(rng, *pair, fixed))
            in_middle = 0 <= index - len(opening) < len(middle)
            if in_middle and template.startswith(("{A}", "{B}")) and rng.random() < 0.25:
                sentence = f"{rng.choice(ADVERBS)}, {sentence}"
            sentences.append(sentence)
        return sentences


class _Slots(dict):
    """Template fields, drawn only when a template asks for them."""

    def __init__(self, rng: random.Random, a: _Person, b: _Person, fixed: dict[str, str]):
        super().__init__(fixed)
        self._rng, self._a, self._b = rng, a, b

    def __missing__(self, key: str) -> str:
        rng, a, b = self._rng, self._a, self._b
        if key == "A":
            return a.name
        if key == "B":
            return b.name
        person = b if key.endswith("B") else a
        field = key.removesuffix("_B").removesuffix("B")
        if field in ("She", "He"):
            return person.pronoun
        if field in ("trade", "home", "animal", "pet", "food"):
            return getattr(person, field)
        if field == "keep":
            return person.keepsake
        if field == "a_keep":
            return _with_article(person.keepsake)
        if field == "a_animal":
            return _with_article(person.animal)
        if field == "colour":
            return rng.choice(COLOURS)
        if field == "work":
            return rng.choice(TRADES[person.trade])
        if field == "feel":
            return rng.choice(FEELINGS)
        if field == "thing":
            return rng.choice(THINGS)
        if field == "a_thing":
            return _with_article(f"{rng.choice(COLOURS)} {rng.choice(THINGS)}")
        raise KeyError(key)


def story(rng: random.Random) -> str:
    """One short story: a few paragraphs about one cast, about 150 words."""
    world = _World(rng)
    return "\n\n".join(" ".join(world.chapter()) for _ in range(2))


def story_pieces(rng: random.Random) -> Iterator[str]:
    """Endless story text, sentence by sentence.

    Each piece carries its own separator in front (a space, or a blank line where a new chapter
    starts), so pieces can simply be joined, and none ends in white space.
    """
    world = _World(rng)
    first = True
    while True:
        for index, sentence in enumerate(world.chapter()):
            yield (" " if index else "" if first else "\n\n") + sentence
            first = False
