from benchmarks.step.measure import main

main()
