//! Checks the layers of the source. Imports go down only, unsafe code is in one package, the core has no clock and no IO, and no more than three files import one another in a ring.

mod rules;

use tonic_rdma_checks::{files_of, read, root};

use crate::model::{Package, rings};
use rules::SourceFile;

/// The workspace's crates, with the folders of their sources, and their layers. A crate imports crates of lower layers only.
const PACKAGES: &[(&str, &str, u8)] = &[
    ("tonic_rdma_verbs", "verbs/src", 0),
    ("tonic_rdma_models", "verbs/models/src", 4),
    ("tonic_rdma", "src", 1),
    ("tonic_rdma_tensor", "tensor/src", 2),
    ("tonic_rdma_collective", "collective/src", 3),
    ("tonic_rdma_flight", "flight/src", 3),
    ("tonic_rdma_graph", "graph/src", 3),
    ("tonic_rdma_proto", "proto/generated/src", 3),
    ("tonic_rdma_payload", "cli/payload/src", 3),
    ("tonic_rdma_commands", "commands/src", 3),
    ("tonic_rdma_cli", "cli/src", 4),
    ("tonic_rdma_graph_command", "graph/src/bin/tonic-rdma-graph", 4),
    ("tonic_rdma_allreduce", "collective/command/src", 4),
    ("tonic_rdma_training", "training/src", 4),
    ("tonic_rdma_interop", "interop/src", 4),
    ("tonic_rdma_interop_matrix", "interop/src/matrix", 4),
    ("tonic_rdma_generate", "proto/generate/src", 4),
    ("tonic_rdma_checks", "checks/src", 4),
    ("tonic_rdma_test_support", "tests/support/src", 4),
];

#[test]
fn imports_go_down_only() {
    assert_none(packages().iter().flat_map(|package| rules::layers(package, PACKAGES)));
}

#[test]
fn unsafe_code_is_in_one_package() {
    assert_none(rules::forbids_unsafe_code(&packages()));
    assert_none(rules::unsafe_code(&files()));
}

#[test]
fn the_core_has_no_clock_and_no_io() {
    assert_none(packages().iter().flat_map(rules::purity));
}

#[test]
fn no_ring_has_more_than_three_files() {
    assert_none(packages().iter().flat_map(rings));
}

#[test]
fn every_member_of_the_workspace_is_checked() {
    let manifest = read(&root().join("Cargo.toml"));
    let members =
        manifest.lines().find_map(|line| line.strip_prefix("members = [")).expect("a list of members");
    for member in members.split('"').skip(1).step_by(2) {
        let sources = if member == "." { "src".to_owned() } else { format!("{member}/src") };
        assert!(PACKAGES.iter().any(|(_, folder, _)| *folder == sources), "add {member} to PACKAGES");
    }
}

fn packages() -> Vec<Package> {
    PACKAGES.iter().map(|(name, folder, _)| Package::read(name, folder)).collect()
}

/// Returns all Rust files of the repository.
fn files() -> Vec<SourceFile> {
    let files: Vec<SourceFile> = files_of(root(), "rs")
        .into_iter()
        .map(|path| SourceFile::new(path.strip_prefix(root()).unwrap().to_string_lossy(), read(&path)))
        .collect();
    assert!(files.len() > 300, "only {} files were found: is this check broken?", files.len());
    files
}

fn assert_none(violations: impl IntoIterator<Item = String>) {
    let violations: Vec<_> = violations.into_iter().collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}
