from benchmarks.prediction.measure import main

main()
