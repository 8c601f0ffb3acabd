//! Counts of the descriptors and mappings of the whole process, and its limit of descriptors.

use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets this process open as many files as the system allows.
pub fn raise_open_files() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files).unwrap();
}

/// Counts the open descriptors and the mappings of shared memory of this process.
pub fn descriptors_and_mappings() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// Waits until this process has no more descriptors and mappings than `before`, or fails. For tests that run
/// alone in their process.
pub async fn settled(before: (usize, usize)) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let now = descriptors_and_mappings();
        if now.0 <= before.0 && now.1 <= before.1 {
            return;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "descriptors, mappings: {before:?} before, {now:?} after"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
