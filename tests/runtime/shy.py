"""Models whose sessions hesitate, for tests of steps that are put off."""

from zendaya import Model


class ShyModel(Model):
    """Its sessions end whenever they have read little for their step, and after their eighth word."""

    def open(self, schedule, **options):
        session, read = super().open(schedule, **options), [0]
        step = session.rows.step

        def watched(ids, horizon, tap=None):
            read[0] = horizon
            return step(ids, horizon, tap)

        def choose(logits_V, text, **_):
            number = len(text) + 1
            return self.config.framing.end if read[0] < 2 * number or number > 8 else 100 + number

        session.rows.step, session._context.rules.choose = watched, choose
        return session
