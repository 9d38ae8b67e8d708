from benchmarks.validation.measure import main

main()
