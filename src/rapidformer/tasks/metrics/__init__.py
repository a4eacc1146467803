"""The fields' own metrics, each over a whole split at once.

Every function takes plain lists or arrays and returns plain floats. Accuracy-like values are
shares (0 to 1); exact match and F1 of questions, BLEU and ROUGE are in percent, as they are
published.
"""
