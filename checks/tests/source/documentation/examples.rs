//! Finds the examples in a piece of documentation.

/// A block of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Example {
    /// The words after the three backquotes, such as `no_run`.
    pub(crate) attributes: Vec<String>,
    pub(crate) code: String,
}

impl Example {
    /// Returns true if a doc test compiles the example and expects success.
    pub(crate) fn is_compiled(&self) -> bool {
        const COMPILED: &[&str] = &["rust", "no_run"];
        self.attributes.iter().all(|attribute| COMPILED.contains(&attribute.as_str()))
    }

    /// Returns the attribute that keeps the example from being compiled, or makes it a program of its own, which takes a second to
    /// compile. An example that must not compile has to name the compiler's error, so that it fails for that reason alone.
    pub(crate) fn left_out(&self) -> Option<&str> {
        const BARRED: &[&str] = &["ignore", "standalone_crate", "should_panic"];
        let barred = |attribute: &&String| BARRED.iter().any(|barred| attribute.starts_with(barred));
        let names_error = self.attributes.iter().any(|attribute| attribute.starts_with("E0"));
        let vague = |attribute: &&String| *attribute == "compile_fail" && !names_error;
        self.attributes.iter().find(|attribute| barred(attribute) || vague(attribute)).map(String::as_str)
    }

    /// Returns the lines that readers see.
    pub(crate) fn visible(&self) -> impl Iterator<Item = &str> {
        self.code.lines().filter(|line| {
            let line = line.trim_start();
            line != "#" && !line.starts_with("# ")
        })
    }
}

/// Returns all blocks of code of `docs`.
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

/// Returns the first word of `docs`.
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
        let compiled: Vec<_> = found.iter().map(Example::is_compiled).collect();
        assert_eq!(compiled, [true, false, true, false]);
        let left_out: Vec<_> = found.iter().map(Example::left_out).collect();
        assert_eq!(left_out, [None, None, None, Some("ignore")]);
        let refused =
            |attributes: &str| examples(&format!("```{attributes}\na\n```\n"))[0].left_out().is_some();
        assert!(refused("compile_fail") && !refused("compile_fail,E0382"));
    }
}
