"""What is guessed of unusual programs: the end of a step, evaluations, losses' names, datapoints of batches."""
