from benchmarks.scaled_row.measure import main

main()
