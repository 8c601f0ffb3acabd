//! What the command says of itself: help, version, completions, pages for man, and the programs that it starts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::process::{refused, run, tonic_rdma};

#[allow(dead_code, reason = "its main is cargo's")]
#[path = "../../build.rs"]
mod build;

/// Runs the command, and returns its output unchanged.
fn output(arguments: &[&str]) -> Output {
    tonic_rdma(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_version_has_what_decides_about_peers() {
    assert_eq!(text(&output(&["-V"])), concat!("tonic-rdma ", env!("CARGO_PKG_VERSION"), "\n"));
    let long = text(&output(&["--version"]));
    let (first, facts) = long.split_once('\n').unwrap();
    assert_eq!(first, concat!("tonic-rdma ", env!("CARGO_PKG_VERSION")));
    let facts: BTreeMap<&str, &str> = facts.lines().map(|line| line.split_once(": ").unwrap()).collect();
    let hello = tonic_rdma::unstable::wire::hello::VERSIONS;
    let spoken = format!("{}-{}", hello.oldest, hello.newest);
    let ibverbs = if cfg!(feature = "ibverbs") { "yes" } else { "no" };
    assert_eq!((facts["hello"], facts["ibverbs"]), (spoken.as_str(), ibverbs), "{long}");
    assert_eq!(facts["rust_version"], env!("CARGO_PKG_RUST_VERSION"));
    let names: Vec<_> = facts.keys().copied().collect();
    let all = ["commit", "hello", "hello_layout", "ibverbs", "rust_version", "soft", "tensor_service"];
    assert_eq!(names, all);
}

#[test]
fn the_commit_is_that_of_the_package_or_of_the_checkout() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(build::commit(folder.path()), None);
    let git = |arguments: &[&str]| {
        let status = Command::new("git").arg("-C").arg(folder.path()).args(arguments).output().unwrap();
        assert!(status.status.success(), "{status:?}");
        String::from_utf8(status.stdout).unwrap().trim().to_owned()
    };
    git(&["init", "-q"]);
    let commit = |arguments: &[&str]| {
        git(&[&["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one"], arguments]
            .concat());
    };
    commit(&["--allow-empty"]);
    let manifest = folder.path().join("Cargo.toml");
    fs::write(&manifest, "").unwrap();
    assert_eq!(build::commit(folder.path()), None, "the repository has other files");
    git(&["add", "Cargo.toml"]);
    commit(&[]);
    git(&["-c", "user.name=a", "-c", "user.email=a@b", "tag", "-a", "-m", "a tag", "v1"]);
    assert_eq!(build::commit(folder.path()), Some(git(&["rev-parse", "HEAD"])));
    fs::write(&manifest, "[package]").unwrap();
    assert_eq!(build::commit(folder.path()), Some(git(&["rev-parse", "HEAD"]) + "-dirty"));
    // As cargo writes it into a package. It wins, because the folder may be part of another repository.
    let published = format!("{{\n  \"git\": {{\n    \"sha1\": \"{}\"\n  }}\n}}", "ab".repeat(20));
    let info = folder.path().join(".cargo_vcs_info.json");
    fs::write(&info, published).unwrap();
    assert_eq!(build::commit(folder.path()), Some("ab".repeat(20)));
    fs::write(&info, "{\"git\": {\"sha1\": \"ab\"}}").unwrap();
    assert_eq!(build::commit(folder.path()), None);
}

#[test]
fn help_is_as_wide_as_the_terminal_and_colored_on_demand() {
    let help = |arguments: &[&str], variable: (&str, &str)| {
        text(&tonic_rdma(arguments).env(variable.0, variable.1).stdin(Stdio::null()).output().unwrap())
    };
    for (columns, widest) in [("60", 60), ("100", 100), ("300", 100)] {
        let shown = help(&["bridge", "--help"], ("COLUMNS", columns));
        let longest = shown.lines().map(|line| line.chars().count()).max().unwrap();
        // A command line of an example has no place to break it.
        assert!(
            longest <= widest.max(85) && longest + 15 > widest,
            "{longest} columns of {columns}: {shown}"
        );
    }
    let plain = help(&["-h"], ("NO_COLOR", "1"));
    assert!(
        !plain.contains('\u{1b}') && help(&["--color=always", "-h"], ("NO_COLOR", "1")).contains('\u{1b}')
    );
    assert!(!help(&["--color", "never", "-h"], ("CLICOLOR_FORCE", "1")).contains('\u{1b}'));
    refused(&run(&["--color", "blue", "devices"]), 2, &["blue", "auto, always, never"]);
}

#[test]
fn log_messages_are_colored_on_demand() {
    for (color, colored) in [("always", true), ("never", false), ("auto", false)] {
        let output =
            tonic_rdma(&["devices", "--color", color]).env("RDMA_POLCY", "require").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("RDMA_POLCY") && said.contains('\u{1b}') == colored, "--color {color}: {said}");
    }
}

#[test]
fn bash_completes_commands_and_options() {
    let script = text(&output(&["completions", "bash"]));
    let complete = |words: &[&str]| {
        let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let ask = format!(
            "{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={}\n$(complete -p tonic-rdma | sed 's/.*-F \\([^ ]*\\).*/\\1/') tonic-rdma '{last}' '{before}'\necho \"${{COMPREPLY[*]}}\"",
            words.len() - 1
        );
        let output = Command::new("bash").args(["--norc", "-c", &ask]).output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        text(&output).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["tonic-rdma", "comp"]), ["compare", "completions"]);
    assert_eq!(complete(&["tonic-rdma", "compare", "--prov"]), ["--provider"]);
    assert_eq!(complete(&["tonic-rdma", "bridge", "--policy", "re"]), ["require"]);
    assert_eq!(complete(&["tonic-rdma", "parameter-server-"]), [""; 0], "no command of its own processes");
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        let script = text(&output(&["completions", shell]));
        assert!(script.contains("devices") && script.contains("check"), "{shell}: {script}");
    }
    refused(&run(&["completions", "csh"]), 2, &["csh", "bash, elvish, fish, powershell, zsh"]);
}

#[test]
fn man_shows_each_page() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    assert_eq!(text(&output(&["man", path])), "");
    let mut pages: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.sort();
    let names: Vec<_> = pages.iter().map(|page| page.file_name().unwrap().to_str().unwrap()).collect();
    for name in ["tonic-rdma.1", "tonic-rdma-compare.1", "tonic-rdma-bridge.1", "tonic-rdma-completions.1"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    assert!(
        !names.iter().any(|name| name.contains("server-worker") || name.contains("compare-server")),
        "{names:?}"
    );
    assert_eq!(fs::read(&pages[names.iter().position(|name| *name == "tonic-rdma.1").unwrap()]).unwrap(), {
        output(&["man"]).stdout
    });
    refused(&run(&["man", "/no/such/folder"]), 2, &["/no/such/folder"]);
    for page in pages {
        let mut man = Command::new("man");
        man.args(["--warnings", "-E", "UTF-8", "-l", "-P", "cat"]).arg(&page).env("MANWIDTH", "100");
        let Ok(output) = man.output() else {
            eprintln!("skipped: there is no man");
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.is_empty() && text(&output).contains("SYNOPSIS"), "{}: {said}", page.display());
    }
}

/// Makes a program that says its process and its arguments, and ends with status 7. Another process writes it: a file
/// that this one had open could not be executed while a child of another test inherits it.
fn make_program(at: &Path) {
    shell(at, "printf '#!/bin/sh\\necho $$ \"$@\"\\nexit 7\\n' > \"$0\" && chmod 755 \"$0\"");
}

fn shell(at: &Path, script: &str) {
    assert!(Command::new("sh").args(["-c", script]).arg(at).status().unwrap().success(), "{script}");
}

#[test]
fn installed_programs_are_commands() {
    // In a folder of its own, because the programs may lie beside it where it was built.
    let (here, path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let own = here.path().join("tonic-rdma");
    shell(&own, concat!("cp '", env!("CARGO_BIN_EXE_tonic-rdma"), "' \"$0\""));
    let start = |arguments: &[&str]| {
        let mut command = Command::new(&own);
        command.args(arguments).env("PATH", path.path()).stdin(Stdio::null());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        (child.id(), child.wait_with_output().unwrap())
    };
    let (_, missing) = start(&["graph", "--nodes"]);
    refused(&missing, 2, &["tonic-rdma-graph is neither", "cargo install", "tonic-rdma-graph`"]);
    assert!(!text(&start(&["--help"]).1).contains("tonic-rdma-graph"));
    refused(&start(&["grahp"]).1, 2, &["unrecognized subcommand 'grahp'", "accepted: compare"]);

    // An empty part of PATH is not the working directory.
    make_program(&path.path().join("tonic-rdma-graph"));
    for nowhere in ["", ":/no/such/folder"] {
        let mut command = Command::new(&own);
        let output = command.arg("graph").env("PATH", nowhere).current_dir(path.path()).output().unwrap();
        refused(&output, 2, &["neither beside this program nor on PATH"]);
    }
    fs::remove_file(path.path().join("tonic-rdma-graph")).unwrap();

    // A file that can't be executed is no program.
    fs::write(path.path().join("tonic-rdma-graph"), "").unwrap();
    refused(&start(&["graph"]).1, 2, &["neither beside this program nor on PATH"]);
    make_program(&path.path().join("tonic-rdma-graph"));
    make_program(&here.path().join("tonic-rdma-allreduce"));
    assert!(text(&start(&["--help"]).1).contains("tonic-rdma-graph"));
    refused(&start(&["grahp"]).1, 2, &["did you mean graph?"]);
    for (arguments, passed) in [
        (&["graph", "model.onnx", "--parts", "2"][..], "model.onnx --parts 2"),
        (&["graph", "--help"], "--help"),
        (&["allreduce", "-V"], "-V"),
        (&["allreduce", "-5"], "-5"),
    ] {
        let (id, output) = start(arguments);
        // It is the same process, so signals and the exit status are the program's.
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{id} {passed}\n"));
        assert_eq!(output.status.code(), Some(7));
    }
}
