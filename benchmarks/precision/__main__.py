from benchmarks.precision.measure import main

main()
