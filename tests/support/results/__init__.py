"""Result directories with a known truth, and laws that analyses of any directory satisfy."""
