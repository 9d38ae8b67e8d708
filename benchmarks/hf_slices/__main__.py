from benchmarks.hf_slices.measure import main

main()
