from benchmarks.planner.measure import main

main()
