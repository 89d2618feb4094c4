"""Programs for an interpreter with torch: they import torch and the standard library, and nothing of benchctl."""
