//! Gives `--version` the commit of the sources, as the variable `COMMIT`. It is empty if the commit is not known.

use std::path::Path;
use std::process::Command;

#[allow(clippy::print_stdout, reason = "cargo reads it")]
fn main() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rerun-if-changed=build.rs");
    // Each commit would make a developer's next debug build longer.
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if is_release {
        println!("cargo::rerun-if-changed=src");
        // Git may keep no log. Cargo would run this again and again for a file that is missing.
        let log = git(package, &["rev-parse", "--git-path", "logs/HEAD"]);
        if let Some(log) = log.filter(|log| package.join(log).exists()) {
            println!("cargo::rerun-if-changed={log}");
        }
    }
    let commit = if is_release { commit(package) } else { None };
    println!("cargo::rustc-env=COMMIT={}", commit.unwrap_or_default());
}

/// Returns the commit from which cargo made the published package in `folder`, or else the one that is checked out
/// there, with `-dirty` if files differ from it. A repository that only surrounds the sources has no commit of them.
pub(crate) fn commit(folder: &Path) -> Option<String> {
    if let Ok(text) = std::fs::read_to_string(folder.join(".cargo_vcs_info.json")) {
        return text.split_once("\"sha1\": \"")?.1.get(..40).map(str::to_owned);
    }
    git(folder, &["ls-files", "--error-unmatch", "Cargo.toml"])?;
    // No tag is left to describe it by.
    git(folder, &["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"])
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
