from benchmarks.attention.measure import main

main()
