//! Tries every command line of README and the book: the parser must accept the commands of a page, and the
//! names in a page must exist.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use tonic_rdma_checks::pages::{self, Page, inline_code};
use tonic_rdma_checks::root;

use crate::args::{self, Cli};
use crate::compare::modes::mode::Mode;

/// Programs that are not of this repository, and that pages may tell their readers to start.
const PROGRAMS: [&str; 11] =
    ["apt", "cd", "docker", "gcc", "git", "install", "kubectl", "pip", "python", "systemctl", "useradd"];
/// Programs that start another program, which is the last word without a dash. `PROGRAM` is the reader's own.
const LAUNCHERS: [&str; 3] = ["mpirun", "torchrun", "srun"];
/// Packages with a command of their own, and their folders.
const COMMANDS: [(&str, &str); 3] = [
    ("tonic-rdma-allreduce", "collective/command"),
    ("tonic-rdma-graph", "graph"),
    ("tonic-rdma-training", "training"),
];
/// Options of other programs, which pages mention.
const OPTIONS_OF_OTHERS: [&str; 3] = ["--locked", "--network", "--ulimit"];

#[test]
fn every_command_line_is_accepted() {
    let mut seen = 0;
    let mut faults = Vec::new();
    for page in pages::all() {
        for line in page.commands() {
            seen += 1;
            let fault = fault(&line);
            faults.extend(fault.map(|fault| format!("{}: `{line}`: {fault}", page.path.display())));
        }
    }
    assert!(faults.is_empty(), "command lines that don't work:\n{}", faults.join("\n"));
    assert!(seen > 30, "only {seen} command lines were found: is this check broken?");
}

#[test]
fn commands_and_options_in_sentences_are_accepted() {
    let known = options();
    let of_package =
        |name: &str| COMMANDS.iter().any(|(_, folder)| fault_of_options(folder, &[name]).is_none());
    let mut faults = Vec::new();
    for page in pages::all() {
        let name = page.path.display();
        // The changelog names what was.
        if page.path == Path::new("CHANGELOG.md") {
            continue;
        }
        for code in inline_code(&page.prose()).0 {
            let words: Vec<&str> = code.split_whitespace().collect();
            match words.first() {
                // A mention in a sentence may leave out required arguments.
                Some(&"tonic-rdma") if words.len() > 1 => faults.extend(
                    refusal(&words)
                        .filter(|(kind, _)| *kind != ErrorKind::MissingRequiredArgument)
                        .map(|(_, text)| format!("{name}: `{code}`: {text}")),
                ),
                Some(_) if code.contains("cargo test -p ") => {
                    faults.extend(fault(&code).map(|fault| format!("{name}: `{code}`: {fault}")));
                }
                Some(option) if option.starts_with("--") => {
                    let option = option.split('=').next().unwrap();
                    let of_python = fault_of_python(&[option]).is_none();
                    if !known.contains(option)
                        && !of_package(option)
                        && !of_python
                        && !OPTIONS_OF_OTHERS.contains(&option)
                    {
                        faults.push(format!("{name}: no command has the option {option}"));
                    }
                }
                _ => {}
            }
        }
    }
    assert!(faults.is_empty(), "options that don't exist:\n{}", faults.join("\n"));
}

#[test]
fn tables_have_every_mode_and_every_command() {
    let modes = Mode::all().iter().map(|mode| ("benchmarks.md", mode.to_string()));
    let command = Cli::command();
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let commands = commands.map(|command| format!("tonic-rdma {}", command.get_name()));
    let programs =
        COMMANDS.iter().map(|(name, _)| format!("{name}`, or `{}", name.replacen("rdma-", "rdma ", 1)));
    for (page, name) in modes.chain(commands.chain(programs).map(|name| ("commands.md", name))) {
        let has = pages::of_book(page).remove(0).text.contains(&format!("\n| `{name}` | "));
        assert!(has, "{page} does not explain {name}");
    }
}

#[test]
fn wrong_command_lines_are_found() {
    for line in [
        "tonic-rdma compare --quick --json out.json",
        "RUST_LOG=debug tonic-rdma devices",
        "RDMA_POLL_MODE=event taskset -c 0 tonic-rdma compare --quick",
        "benches/under half-a-cpu tonic-rdma compare --quick",
        "cargo run --release -- compare",
        "cargo run --release --features ibverbs -- devices --check",
        "cargo run --example greeter-client -- 127.0.0.1:50051 1000",
        "cargo test",
        "cargo install --path cli",
        "cargo test -p tonic-rdma-verbs --features ibverbs --test devices",
        "cargo run --release -p tonic-rdma-allreduce -- --ranks 2 --quick",
        "mpirun -n 4 target/release/tonic-rdma-allreduce --json rows.json",
        "tonic-rdma-training --sync parameter-server --workers 2",
        "tonic-rdma-graph MODEL.onnx --parts 2",
        "tonic-rdma graph MODEL.onnx --parts 2",
        "srun -n 4 PROGRAM",
        "examples/run-all",
        "apt install gcc",
        "pip install ./python",
        "python -m tonic_rdma compare --sizes 16MiB",
    ] {
        assert_eq!(fault(line), None, "{line}");
    }
    for line in [
        "tonic-rdma compare --fast",
        "tonic-rdma measure",
        "taskset -c 0 tonic-rdma measure",
        "benches/under half-a-cpu tonic-rdma measure",
        "tonic-rdma bridge --listen tcp://127.0.0.1:1",
        "cargo run --release -- compare --sizes 4lots",
        "cargo run --release --features quic -- devices",
        "cargo run --example no-such",
        "cargo test --test no-such",
        "cargo bench --bench no-such",
        "cargo test -p tonic-rdma-verbs --test no-such",
        "cargo test -p tonic-rdma-quic",
        "cargo run --release -p tonic-rdma-allreduce -- --fast",
        "mpirun -n 4 target/release/tonic-rdma-allreduce --fast",
        "tonic-rdma-graph MODEL.onnx --fast",
        "tonic-rdma graph MODEL.onnx --fast",
        "mpirun -n 4 target/release/tonic-rdma-none",
        "examples/run-none",
        "python -m tonic_rdma compare --fast",
        "curl https://example.com/",
    ] {
        assert!(fault(line).is_some(), "{line}");
    }
    let text = "`a`\n```sh\nb \\\n  c && d # e\n\n# f\n```\n<!-- `g`\n`h` -->\n```text\n`i`\n```\n".into();
    let page = Page { path: "README.md".into(), text };
    assert_eq!(page.commands(), ["b c", "d"]);
    assert_eq!(inline_code(&page.prose()).0, ["a"]);
}

/// Returns the fault of a line, or `None` if the line is valid.
fn fault(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().skip_while(|word| word.contains('=')).collect();
    let words = match &words[..] {
        ["taskset", "-c", _, rest @ ..] | ["benches/under", _, rest @ ..] => rest,
        words => words,
    };
    match words.first() {
        Some(&"tonic-rdma") if program_of(words).is_some() => {
            fault_of_options(program_of(words)?, &words[2..])
        }
        Some(&"tonic-rdma") => refusal(words).map(|(_, text)| text),
        Some(&"cargo") => fault_of_cargo(&words[1..]),
        Some(&"PROGRAM") => None,
        Some(&"python") if words[1..].starts_with(&["-m", "tonic_rdma"]) => fault_of_python(&words[3..]),
        Some(launcher) if LAUNCHERS.contains(launcher) => fault_of_launched(words),
        Some(program) if folder_of(program).is_some() => fault_of_options(folder_of(program)?, &words[1..]),
        Some(program) if program.contains('/') => {
            let there = root().join(program).is_file();
            (!there).then(|| format!("{program} does not exist"))
        }
        Some(program) if PROGRAMS.contains(program) => None,
        other => Some(format!("{other:?} is no program that pages may name")),
    }
}

/// Returns the folder of the program that `tonic-rdma NAME` starts.
fn program_of(words: &[&str]) -> Option<&'static str> {
    folder_of(&format!("tonic-rdma-{}", words.get(1)?))
}

/// Returns the folder of a package's command.
fn folder_of(command: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(name, _)| *name == command).map(|(_, folder)| *folder)
}

/// Returns the fault of the program that a launcher starts: `PROGRAM`, or the command of a package.
fn fault_of_launched(words: &[&str]) -> Option<String> {
    let names = |word: &str| COMMANDS.iter().find(|(name, _)| word == format!("target/release/{name}"));
    match words.iter().enumerate().find_map(|(at, word)| Some((at, names(word)?))) {
        Some((at, (_, folder))) => fault_of_options(folder, &words[at + 1..]),
        None if words.last() == Some(&"PROGRAM") => None,
        None => Some(format!("{} starts no program that pages may name", words[0])),
    }
}

/// Returns an option that the source of the command in `folder` does not have.
fn fault_of_options(folder: &str, words: &[&str]) -> Option<String> {
    let files = ["src/options.rs", "src/bin/tonic-rdma-graph/options.rs"];
    let files = files.iter().filter_map(|file| fs::read_to_string(root().join(folder).join(file)).ok());
    let options: String = files.collect();
    let known = |option: &str| options.contains(&format!("{}:", option.replace('-', "_")));
    let unknown = words.iter().filter_map(|word| word.strip_prefix("--")).find(|option| !known(option));
    unknown.map(|option| format!("the command in {folder} has no option --{option}"))
}

/// Returns an option that no command of the Python package has.
fn fault_of_python(words: &[&str]) -> Option<String> {
    let commands = ["_compare.py", "_compare_collectives.py", "_doctor.py"];
    let paths = commands.iter().map(|file| root().join("python/tonic_rdma").join(file));
    let source: String = paths.map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut options = words.iter().filter(|word| word.starts_with("--"));
    let unknown = options.find(|option| !source.contains(&format!("\"{option}\"")));
    unknown.map(|option| format!("no command of the Python package has the option {option}"))
}

/// Returns the error of `tonic-rdma` for the command line `words`, or `None` if it is accepted.
fn refusal(words: &[&str]) -> Option<(ErrorKind, String)> {
    let error = Cli::try_parse_from(words).err()?;
    let asked = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion].contains(&error.kind());
    (!asked).then(|| (error.kind(), error.to_string()))
}

/// Returns the fault of the arguments of cargo, or `None` if they are valid.
fn fault_of_cargo(words: &[&str]) -> Option<String> {
    let (own, passed) = match words.iter().position(|word| *word == "--") {
        Some(at) => (&words[..at], &words[at + 1..]),
        None => (words, &[][..]),
    };
    let value = |option: &str| own.windows(2).find(|pair| pair[0] == option).map(|pair| pair[1]);
    let package = value("-p");
    let command_of = COMMANDS.iter().find(|(name, _)| package == Some(name)).map(|(_, folder)| *folder);
    let folder = match package.map(member) {
        Some(None) => return Some(format!("there is no package {}", package?)),
        folder => folder.flatten(),
    };
    let folder = folder.as_deref();
    if let Some(feature) =
        value("--features").filter(|feature| !has_feature(folder.unwrap_or("cli"), feature))
    {
        return Some(format!("there is no feature {feature}"));
    }
    for (option, paths) in [
        ("--example", &["examples/NAME.rs"][..]),
        ("--test", &["tests/NAME.rs", "tests/NAME/main.rs"]),
        ("--bench", &["benches/NAME.rs", "benches/NAME/main.rs"]),
        ("--path", &["NAME"]),
    ] {
        let Some(name) = value(option) else { continue };
        let base = root().join(folder.unwrap_or("."));
        if !paths.iter().any(|path| base.join(path.replace("NAME", name)).exists()) {
            return Some(format!("there is no {name} for {option}"));
        }
    }
    let command = *own.first()?;
    if !["run", "test", "bench", "install", "build"].contains(&command) {
        return Some(format!("cargo {command} is not what pages tell readers to do"));
    }
    if command != "run" || value("--example").is_some() {
        return None;
    }
    match command_of {
        Some(folder) => fault_of_options(folder, passed),
        None => refusal(&[&["tonic-rdma"], passed].concat()).map(|(_, text)| text),
    }
}

/// Returns the folder of a member of the workspace.
fn member(package: &str) -> Option<String> {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = workspace.lines().find(|line| line.starts_with("members = ")).unwrap();
    let name = format!("\nname = \"{package}\"\n");
    let has_name =
        |folder: &&str| fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap().contains(&name);
    members.split('"').skip(1).step_by(2).find(has_name).map(str::to_owned)
}

/// Returns whether the package in `folder` has this feature. The features of the command's package are the
/// library's.
fn has_feature(folder: &str, feature: &str) -> bool {
    let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
    manifest.lines().any(|line| line.starts_with(&format!("{feature} = [")))
}

/// Returns the long options of all commands.
fn options() -> BTreeSet<String> {
    let mut root = args::command().arg(tonic_rdma_commands::color_option());
    root.build();
    let commands = root.get_subcommands().chain([&root]);
    let names =
        commands.flat_map(|command| command.get_arguments().filter_map(|argument| argument.get_long()));
    names.map(|name| format!("--{name}")).collect()
}
