"""The standard metrics of each field, computed over an entire split.

Every function takes plain lists or arrays and returns plain floats. Accuracy and similar values are
fractions (0 to 1); exact match and F1 of questions, BLEU and ROUGE are percentages, as published.
"""
