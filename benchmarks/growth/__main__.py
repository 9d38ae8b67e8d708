from benchmarks.growth.measure import main

main()
