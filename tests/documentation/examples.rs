//! Finds the examples in a piece of documentation.

/// A block of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Example {
    /// What stands behind the three backquotes, such as `no_run`.
    pub(crate) attributes: Vec<String>,
    pub(crate) code: String,
}

impl Example {
    /// Whether rustdoc takes it for Rust.
    pub(crate) fn is_rust(&self) -> bool {
        const OF_RUST: &[&str] = &["rust", "no_run", "should_panic", "ignore", "compile_fail"];
        self.attributes.iter().all(|attribute| OF_RUST.contains(&attribute.as_str()))
    }

    /// The attribute, if any, that keeps it from being compiled, or has it compiled by itself, which takes a second each.
    pub(crate) fn not_compiled(&self) -> Option<&str> {
        const BARRED: &[&str] = &["ignore", "compile_fail", "standalone_crate", "should_panic"];
        let barred = |attribute: &&String| BARRED.iter().any(|barred| attribute.starts_with(barred));
        self.attributes.iter().find(barred).map(String::as_str)
    }

    /// The lines that readers see.
    pub(crate) fn visible(&self) -> impl Iterator<Item = &str> {
        self.code.lines().filter(|line| {
            let line = line.trim_start();
            line != "#" && !line.starts_with("# ")
        })
    }
}

/// All blocks of code of `docs`.
pub(crate) fn examples(docs: &str) -> Vec<Example> {
    let mut found = Vec::new();
    let mut open: Option<Example> = None;
    for line in docs.lines() {
        match (line.trim_start().strip_prefix("```"), open.take()) {
            (Some(_), Some(example)) => found.push(example),
            (Some(attributes), None) => {
                let attributes = attributes.split([',', ' ']).filter(|attribute| !attribute.is_empty());
                open = Some(Example {
                    attributes: attributes.map(str::to_owned).collect(),
                    code: String::new(),
                });
            }
            (None, Some(mut example)) => {
                example.code += line;
                example.code.push('\n');
                open = Some(example);
            }
            (None, None) => {}
        }
    }
    found
}

/// The first word of `docs`.
pub(crate) fn first_word(docs: &str) -> &str {
    docs.split_whitespace().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_attributes() {
        let found = examples(
            " Text.\n```no_run\na\n# b\n```\n```text\n┌\n```\n   ```\nc\n   ```\n```ignore\nd\n```\n",
        );
        let codes: Vec<_> = found.iter().map(|example| example.code.as_str()).collect();
        assert_eq!(codes, ["a\n# b\n", "┌\n", "c\n", "d\n"]);
        assert_eq!(found[0].visible().collect::<Vec<_>>(), ["a"]);
        let rust: Vec<_> = found.iter().map(Example::is_rust).collect();
        assert_eq!(rust, [true, false, true, true]);
        let barred: Vec<_> = found.iter().map(Example::not_compiled).collect();
        assert_eq!(barred, [None, None, None, Some("ignore")]);
    }
}
