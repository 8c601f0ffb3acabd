//! Gives `--version` the commit of the sources, as the variable `COMMIT`. It is empty if the commit is not known.

use std::path::Path;
use std::process::Command;

#[allow(clippy::print_stdout, reason = "cargo reads it")]
fn main() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    println!("cargo::rerun-if-changed=build.rs");
    // Each commit would make a developer's next debug build longer.
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if let Some(log) = is_release.then(|| git(package, &["rev-parse", "--git-path", "logs/HEAD"])).flatten() {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = if is_release { commit(package) } else { None };
    println!("cargo::rustc-env=COMMIT={}", commit.unwrap_or_default());
}

/// Returns the commit from which cargo made the published package in `folder`, or else the one that is checked out
/// there.
pub(crate) fn commit(folder: &Path) -> Option<String> {
    let published = std::fs::read_to_string(folder.join(".cargo_vcs_info.json")).ok();
    let of_package = |text: String| text.split_once("\"sha1\": \"").map(|(_, rest)| rest[..40].to_owned());
    published.map_or_else(|| git(folder, &["rev-parse", "HEAD"]), of_package)
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
