from xgpt.cli import main

if __name__ == "__main__":
    main()
