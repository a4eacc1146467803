"""A reward function: it gets many answers at once, and the columns of the data that it names."""


def reward(prompts: list[str], answers: list[str], digit: list[str]) -> list[float]:
    """1 for the digit and nothing else; less for the digit with something after it."""
    return [
        1.0 if answer == right else 0.5 * answer.startswith(right)
        for answer, right in zip(answers, digit, strict=True)
    ]
