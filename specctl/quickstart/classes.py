"""The narrow domain of quickstart: requests for a Python class, made from phrasings, things and their attributes.

Three sets that share no phrasing, no thing and no attributes: to train a draft on, to choose its best state and its
length by, and to measure on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

from specctl.prompts import Prompt
from specctl.text.messages import Message

CLASS = "python classes"


@dataclass(frozen=True)
class Parts:
    """phrasings: with {thing} and {attributes}, or {Attributes} where these begin a sentence."""

    phrasings: tuple[str, ...]
    things: tuple[str, ...]
    attributes: tuple[str, ...]

    def prompts(self, name: str) -> list[Prompt]:
        """Every combination, in an order that mixes them and never changes."""
        mixed = list(product(self.phrasings, self.things, self.attributes))
        Random(name).shuffle(mixed)
        return [
            Prompt(id=f"{name}-{number}", class_=CLASS, messages=(Message("user", _written(*parts)),))
            for number, parts in enumerate(mixed, 1)
        ]


def _written(phrasing: str, thing: str, attributes: str) -> str:
    text = phrasing.format(thing=thing, attributes=attributes, Attributes=attributes[0].upper() + attributes[1:])
    return text[0].upper() + text[1:]


TRAINING = Parts(
    phrasings=(
        "Write a Python class for {thing} with {attributes}.",
        "Create a small class in Python that models {thing}. It stores {attributes}.",
        "Implement {thing} as a Python class; what it holds is {attributes}.",
        "I need a class in Python that describes {thing}: {attributes}.",
        "Show me Python code for a class of {thing}, which keeps {attributes}.",
        "Please code a short Python class. It stands for {thing} and has {attributes}.",
        "How would you write {thing} as a class in Python? It knows {attributes}.",
        "{Attributes}: put them into a Python class for {thing}.",
        "Help me with a Python class for {thing}, which needs {attributes}.",
        "Give me the Python class of {thing}; the fields are {attributes}.",
    ),
    things=(
        "a library book",
        "a bank account",
        "a delivery van",
        "a coffee machine",
        "a football player",
        "a hotel room",
        "a garden plant",
        "a shopping cart",
        "a weather station",
        "a music album",
        "a school course",
        "a parking meter",
        "a cargo ship",
        "a cake recipe",
        "a job offer",
        "a phone contract",
        "a dog",
        "a chess piece",
        "a city map",
        "a tool box",
    ),
    attributes=(
        "a name and a price",
        "a title, an owner and a date",
        "an id, a weight and a color",
        "a size and a status",
        "a code, a city and a country",
        "a length, a width and a height",
        "a label and a list of notes",
        "a speed and a limit",
        "a number, a type and a place",
        "a start and an end",
        "a brand, a model and a year",
        "a balance and a currency",
        "a level and a score",
        "an email and a phone number",
        "an author, a language and a number of pages",
        "a temperature and a humidity",
    ),
)

VALIDATION = Parts(
    phrasings=(
        "Could you program {thing} in Python, as a class? It should contain {attributes}.",
        "Design a Python class. Subject: {thing}. Content: {attributes}.",
        "Make {thing} out of a Python class that has got {attributes}.",
        "I am looking for Python source: a class representing {thing}, including {attributes}.",
    ),
    things=("a train journey", "a museum", "a car dealer", "a guitar", "a robot arm"),
    attributes=(
        "a material and an age",
        "a serial number and a warranty",
        "a distance, a duration and a fare",
        "a room, a floor and a key",
        "a manager and a budget",
    ),
)

HELD_OUT = Parts(
    phrasings=(
        "Code {thing} as a Python class, with {attributes} as its attributes.",
        "In Python, write the class that represents {thing}. It has {attributes}.",
        "Define a Python class for {thing} that includes {attributes}.",
        "Please create a class for {thing} in Python; add {attributes}.",
        "Could I have a Python class that models {thing}, made of {attributes}?",
    ),
    things=(
        "a bus ticket",
        "a web page",
        "a tax form",
        "a swimming pool",
        "an insurance policy",
        "a lesson",
        "a town hall",
        "a camera",
    ),
    attributes=(
        "a user and a password",
        "a month, a rate and a total",
        "a depth and a volume",
        "an address and a telephone",
        "a lens, a sensor and a battery",
        "a host and a port",
        "a teacher, a subject and a grade",
        "a voltage and a current",
        "a customer, a product and a quantity",
        "a latitude and a longitude",
        "a rank, a points total and a team",
        "a capacity and an opening hour",
    ),
)
