from benchmarks.objectives.measure import main

main()
