from benchmarks.documents.measure import main

main()
